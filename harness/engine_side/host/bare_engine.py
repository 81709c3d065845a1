"""SGLang alone: an engine with the arguments of a launch and some prompts, none of our code in its processes.

    python bare_engine.py FILE

JSON: {"environment", "arguments", "optional", "lease", "replaced", "waves", "prompts", "tokens", "images"}. lease: what
to hold of a card for each rank of each stage, or null. replaced: the boot record by which replacement kernels are put
in, in each process, where a CPU has none of SGLang's or a sparse indexer may lack its scores; or null. waves: how many
prompts are generated together, before the prefix cache is flushed and the next ones are. images: empty, or for each
prompt the rows [n,h] of its images, as Qwen2.5-VL takes them from whoever has computed them, one place each; or null.

Run by SGLang's own Python; standard library and SGLang only. The last line says what came back, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any


def name_package() -> None:
    """Our modules by the name that they have on the engine side."""
    package = types.ModuleType("eaglecheck_engine")
    package.__path__ = [str(Path(__file__).resolve().parents[2])]
    sys.modules[package.__name__] = package


def take_cards(given: dict[str, Any]) -> list[Any]:
    """Leases for as long as this process lives, and no other card is seen: an engine of ours elsewhere keeps off."""
    from eaglecheck_engine.both_sides import leases

    count = given["arguments"].get("tp_size", 1) * given["arguments"].get("pp_size", 1)
    return leases.hold_cards(leases.Request(**given["lease"]), count=count, say=lambda text: print(text, flush=True))


def replace_kernels(boot: dict[str, Any]) -> None:
    """What stands in for SGLang's kernels on a CPU; nothing else of ours."""
    from eaglecheck_engine.engine_side.host.import_patches import install_patches

    install_patches(boot)


def keywords(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `sglang.Engine`, less those this release does not know."""
    from sglang.srt.server_args import ServerArgs

    known: set[str] = set()
    for base in ServerArgs.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    return {**given["arguments"], **{name: value for name, value in given["optional"].items() if name in known}}


def sent(rows: list[list[float]] | None) -> Any:
    """Images of one place each, four patches wide."""
    import torch

    if rows is None:
        return None
    sizes = torch.tensor([[1, 2, 2]] * len(rows))
    return [{"format": "precomputed_embedding", "feature": torch.tensor(rows), "image_grid_thw": sizes}]


def main(given: dict[str, Any]) -> None:
    marks = [time.monotonic()]
    import sglang

    marks.append(time.monotonic())
    engine = sglang.Engine(**keywords(given))
    marks.append(time.monotonic())
    print("booted", flush=True)
    sampling = [{"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True} for count in given["tokens"]]
    ends: list[Any] = []
    for count in given["waves"]:
        if ends:
            engine.flush_cache()
        wave = slice(len(ends), len(ends) + count)
        images = [sent(rows) for rows in given["images"][wave]]
        more = {"image_data": images} if any(images) else {}
        ends += engine.generate(input_ids=given["prompts"][wave], sampling_params=sampling[wave], **more)
        print(f"generated {len(ends)}", flush=True)
    verifies = [end["meta_info"].get("spec_verify_ct") for end in ends]
    texts = [end["output_ids"] for end in ends]
    took = {"import": marks[1] - marks[0], "boot": marks[2] - marks[1]}
    print(json.dumps({"release": sglang.__version__, "texts": texts, "verifies": verifies, "took": took}), flush=True)
    engine.shutdown()


#: SGLang's own processes start with this file, too.
GIVEN = json.loads(Path(sys.argv[1]).read_text())
os.environ.update(GIVEN["environment"])
name_package()
if GIVEN["replaced"]:
    replace_kernels(GIVEN["replaced"])
if __name__ == "__main__":
    HELD = take_cards(GIVEN) if GIVEN["lease"] else []
    main(GIVEN)
