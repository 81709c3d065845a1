"""A target's own module from Hugging Face, for targets that are not built here.

The module says what a row's states and logits are; everything about speculation stays ours. It runs whole sequences:
rows that hang on a sequence are run as the sequences that they stand for, each from its first token. Nothing about a
module is taken on trust: a few rows are run when it is loaded, and what could not be a target of ours is refused.
`hf_module` makes it. This module must not know an architecture by name.

Shapes: T rows, m rows of branches, h hidden width, V vocabulary, L layers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from reference.attention import SCORES, Kept, Sight
from reference.checkpoint import CheckpointError, DamagedError
from reference.hf_module import brief, check_readable, load_module, shortened
from reference.model import Drafter, Trunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Kept):
    """All that is kept of a sequence: its tokens int64 [T]."""

    tokens: Tensor


class HfTarget:
    """See reference.model.Target; the weights lie in memory once, in the dtype that they are held in."""

    provider = "transformers"

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype
        self.instead = ""  # why the papers' modules do not judge this target, where they were asked first
        config = module.config.get_text_config()
        self.vocab, self.hidden, self.layers = config.vocab_size, config.hidden_size, config.num_hidden_layers
        self.device = next(module.parameters()).device

    @staticmethod
    def load(
        path: Path,
        dtype: torch.dtype = torch.float32,
        *,
        held: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> HfTarget:
        """Read a folder with the module that its config names; CheckpointError where it is not wholly that module.

        held: the dtype another program keeps the weights in, so that both compute with the same numbers.
        """
        check_readable(Path(path))
        module = load_module(Path(path), held or dtype)
        if bad := [name for name, one in module.named_parameters() if not bool(one.isfinite().all())]:
            raise DamagedError(f"{path}: {shortened(bad)} holds NaN or infinity; expected finite numbers")
        target = HfTarget(module.to(device).eval().requires_grad_(False), dtype)
        _probe(Path(path), target)
        return target

    def computing(self, dtype: torch.dtype) -> Self:
        """See Target.computing."""
        view = copy.copy(self)
        view.dtype = dtype
        return view

    def read(self, tokens: Tensor | Sequence[int], *, keep: Collection[int], after: Trunk | None = None) -> Trunk:
        """See Target.read."""
        new = torch.as_tensor(tokens, device=self.device)
        whole = new if after is None else torch.cat((_tokens(after), new))
        states = {i: state[0, len(whole) - len(new) :] for i, state in self._states(whole[None], keep).items()}
        return Trunk(states=states, kept=(Tokens(tokens=whole),), rows=len(whole))

    def branch(self, trunk: Trunk, tokens: Tensor, positions: Tensor, sight: Sight) -> Mapping[int, Tensor]:
        """See Target.branch. ValueError where a row is not what follows the rows that it sees."""
        paths = _paths(len(tokens), positions.tolist(), sight)
        before = _tokens(trunk)
        found: dict[int, list[Tensor | None]] = {i: [None] * len(tokens) for i in trunk.wanted}
        for group in _groups(paths, heads=self.module.config.get_text_config().num_attention_heads):
            sequences = [torch.cat((before[: path.upto], tokens[list(path.rows)])) for path in group]
            # what stands behind a row changes nothing of it, so shorter ones may end in anything
            states = self._states(nn.utils.rnn.pad_sequence(sequences, batch_first=True), trunk.wanted)
            for i, state in states.items():
                for own, path in zip(state, group, strict=True):
                    for place, row in enumerate(path.rows, start=path.upto):
                        found[i][row] = own[place]
        return {i: torch.stack([row for row in rows if row is not None]) for i, rows in found.items()}

    def embed(self, tokens: Tensor) -> Tensor:
        """See Target.embed: the module's own table of input embeddings."""
        table = self.module.get_input_embeddings()
        with _widened([table], self.dtype):
            embedded: Tensor = table(tokens)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """See Target.logits: what the module itself makes of such a state, behind its last layer and norm."""
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        view = copy.copy(self.module)
        view._modules = {**self.module._modules, self.module.base_model_prefix: _Said(rows)}
        with _widened(_beside(self.module), self.dtype):
            logits: Tensor = view(input_ids=torch.zeros(rows.shape[:2], dtype=torch.int64, device=self.device)).logits
        return logits.reshape(*hidden.shape[:-1], logits.shape[-1])

    def carries(self, head: Drafter) -> None:
        """CheckpointError where a draft takes something of the module's that is more than a matrix.

        An embedding that the module scales, or logits that it scales or caps: whether a draft was trained with that or
        without is said nowhere.
        """
        tokens = torch.arange(min(self.vocab, 8), device=self.device)
        with torch.inference_mode():
            states = self.read(tokens, keep=(0, self.layers)).states
            table = self.module.get_input_embeddings().weight[tokens].to(self.dtype)
            output = self.module.get_output_embeddings()
            bias = None if output.bias is None else output.bias.to(self.dtype)
            plain = nn.functional.linear(states[self.layers], output.weight.to(self.dtype), bias)
            logits = self.logits(states[self.layers])
        for what, own, one, other in (
            ("embedding", "embedding", states[0], table),
            ("output head", "head", logits, plain),
        ):
            if getattr(head, own, None) is None and not torch.allclose(one, other.to(one.dtype), atol=1e-5, rtol=1e-3):
                name = type(self.module).__name__
                raise CheckpointError(
                    f"the draft has no {what} of its own, and that of {name} is more than a matrix: it scales or caps; "
                    "expected a draft that has its own"
                )

    def _states(self, tokens: Tensor, keep: Collection[int]) -> dict[int, Tensor]:
        """tokens int64 [B,T] -> the states named, [B,T,h] each."""
        with _widened(_parts(self.module), self.dtype), _seen(self._stack(), keep) as states:
            said = _trunk_of(self.module)(input_ids=tokens, use_cache=False)
        return {i: said.last_hidden_state if i == self.layers else states[i] for i in keep}

    def _stack(self) -> nn.ModuleList:
        """The module's own list of its L layers; CheckpointError if it has none."""
        lists = [child for child in _trunk_of(self.module).children() if isinstance(child, nn.ModuleList)]
        stack = next((each for each in lists if len(each) == self.layers), None)
        if stack is None:
            raise CheckpointError(f"{type(self.module).__name__} has no list of its {self.layers} layers")
        return stack


@contextlib.contextmanager
def _seen(stack: nn.ModuleList, keep: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """By index, the states that are wanted, as layers read and give them: no other is kept."""
    states, hooks = dict[int, Tensor](), list[Any]()

    def reads(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        states[0] = given[0] if given else named["hidden_states"]

    def gives(i: int) -> Any:
        def see(_: Any, __: Any, output: Any) -> None:
            states[i] = output if isinstance(output, Tensor) else output[0]

        return see

    for i in keep:
        if i == 0:
            hooks.append(stack[0].register_forward_pre_hook(reads, with_kwargs=True))
        elif i < len(stack):
            hooks.append(stack[i - 1].register_forward_hook(gives(i)))
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


class _Said(nn.Module):
    """Stands where a module has its layers, and says the states that it was given."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Output(self.states)


class _Output:
    """What a trunk answers: its last states, and nothing by any other name."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, _: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None


def _trunk_of(module: Any) -> Any:
    """The module without its output head, and without what it has for images."""
    return module.get_decoder()


def _parts(module: Any) -> list[nn.Module]:
    """What is widened for itself while it runs: each layer, and everything beside them."""
    parts = list[nn.Module]()
    for child in _trunk_of(module).children():
        parts += list(child) if isinstance(child, nn.ModuleList) else [child]
    return parts


def _beside(module: Any) -> list[nn.Module]:
    """What a module has beside its trunk: its output head."""
    return [child for name, child in module.named_children() if name != module.base_model_prefix]


@contextlib.contextmanager
def _widened(parts: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Each of these computes in `dtype` when it is called, and holds its weights as before when it has answered."""
    hooks = []
    for part in dict.fromkeys(parts):
        held = [each for each in (*part.parameters(), *part.buffers()) if each.is_floating_point()]
        if any(each.dtype != dtype for each in part.parameters()):
            hooks += _swapping(part, held, dtype)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _swapping(part: nn.Module, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Any]:
    kept = list[Tensor]()

    def widen(*_: Any) -> None:
        kept[:] = [each.data for each in tensors]
        for each in tensors:
            each.data = each.data.to(torch.promote_types(each.dtype, dtype))

    def restore(*_: Any) -> None:
        for each, data in zip(tensors, kept, strict=True):
            each.data = data

    return [part.register_forward_pre_hook(widen), part.register_forward_hook(restore, always_call=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """One sequence to run: `upto` tokens of the trunk, then these rows of a branch, each the parent of the next."""

    upto: int
    rows: tuple[int, ...]


def _paths(count: int, positions: Sequence[int], sight: Sight) -> list[_Path]:
    """The paths from the trunk to each row on which no other hangs; ValueError where rows do not form such paths."""
    own = torch.ones(count, count, dtype=torch.bool).tril() if sight.own is None else sight.own
    lines = [tuple(torch.nonzero(seen).flatten().tolist()) for seen in own.cpu()]
    for row, (line, upto) in enumerate(zip(lines, sight.upto.tolist(), strict=True)):
        above = lines[line[-2]] if len(line) > 1 else ()
        if line[-1:] != (row,) or line[:-1] != above or positions[row] != upto + len(line) - 1:
            raise ValueError(f"row {row} is no continuation of the rows that it sees; a whole sequence cannot say it")
    inner = {line[-2] for line in lines if len(line) > 1}
    return [_Path(upto=int(sight.upto[row]), rows=line) for row, line in enumerate(lines) if row not in inner]


def _groups(paths: Sequence[_Path], *, heads: int) -> Iterator[list[_Path]]:
    """Paths that are run side by side, the short ones first, so that their scores are no more than SCORES."""
    group: list[_Path] = []
    for path in sorted(paths, key=lambda path: path.upto + len(path.rows)):
        if group and (len(group) + 1) * heads * (path.upto + len(path.rows)) ** 2 > SCORES:
            yield group
            group = []
        group.append(path)
    if group:
        yield group


def _tokens(trunk: Trunk) -> Tensor:
    (kept,) = trunk.kept
    assert isinstance(kept, Tokens)
    return kept.tokens


def _probe(path: Path, target: HfTarget) -> None:
    """Run a few rows; CheckpointError where the module is not a causal target with L + 1 states of one width."""
    tokens = torch.arange(3, 11, device=target.device) * 7 % target.vocab
    with torch.inference_mode():
        try:
            with _widened([*_parts(target.module), *_beside(target.module)], target.dtype):
                said = target.module(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
            states, logits = said.hidden_states, said.logits[0]
            read = target.read(tokens, keep=range(target.layers + 1)).states
            last = read[target.layers]
            own, short = target.logits(last), target.read(tokens[:4], keep=(target.layers,)).states[target.layers]
        except Exception as error:  # whatever a module makes of it
            raise CheckpointError(f"{path}: {type(target.module).__name__} does not run ({brief(error)})") from error
    sizes = [tuple(state.shape) for state in states]
    wanted = [(1, len(tokens), target.hidden)] * (target.layers + 1)
    if sizes != wanted:
        raise CheckpointError(f"{path}: its hidden states are {sizes}; expected {wanted}")
    atol, rtol = (1e-3, 1e-2) if target.dtype == torch.float32 else (0.1, 0.1)
    for what, one, other in (
        ("a row depends on rows behind it", last[:4], short),
        ("its logits are not made of its last hidden state", own, logits),
        *((f"hidden state {i} is not what a layer gives", read[i], state[0]) for i, state in enumerate(states)),
    ):
        if one.shape != other.shape or not torch.allclose(one.float(), other.float(), atol=atol, rtol=rtol):
            raise CheckpointError(f"{path}: {what}; expected a causal language model")
