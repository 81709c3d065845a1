"""The transfer backend SGLang gets: manager, sender, receiver and bootstrap server on the release's own base classes.

Engine side: standard library, NumPy, torch and SGLang only. It takes the place of the "nixl" backend; scheduling,
prebuilt batches and draft inputs stay SGLang's. It must not look at requests.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from .files import CHANGE_PAGES, RULES, NotServed, Room, Want, read_items, settle_device, write_items

#: The name under which SGLang asks for it: mooncake would look for network cards first.
TAKES_PLACE_OF = "nixl"


def register(utils: types.ModuleType, *, folder: str) -> None:
    """Answer for one backend in `disaggregation.utils.get_kv_class`, right after that module's import."""
    classes = make_classes(sys.modules["sglang.srt.disaggregation.base.conn"], folder=folder)
    original: Callable[..., Any] = utils.get_kv_class

    def get_kv_class(transfer_backend: Any, class_type: Any) -> Any:
        if transfer_backend.value != TAKES_PLACE_OF:
            return original(transfer_backend, class_type)
        return classes[class_type.value]

    utils.get_kv_class = get_kv_class  # type: ignore[attr-defined]


def make_classes(conn: Any, *, folder: str) -> dict[str, Any]:
    """The five classes by SGLang's word for them."""
    poll = conn.KVPoll

    class Manager(conn.BaseKVManager):
        """What is known of the other side: one prefill engine, whose rank of the same number it meets."""

        #: 0.5.23 keeps what an aborted request was to be written to until nobody can write there any more.
        enable_deferred_decode_kv_release = supports_deferred_decode_kv_release = True

        def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
            self.kv_args = args
            # of those that share a request; a prefill side counts all ranks
            self.rank = args.engine_rank % (server_args.tp_size // (server_args.dp_size or 1))
            self.disaggregation_mode = mode
            self.prefill_info_table = _AnyAddress()
            self.req_to_decode_prefix_len: dict[int, int] = {}

        def try_ensure_parallel_info(self, address: str) -> bool:
            return True

        def register_to_bootstrap(self) -> None:
            pass

        def is_abort_release_safe(self, room: int, required_acks: int) -> bool:
            """Whether nothing of an aborted request is on its way any more."""
            return room not in RULES.late

        def clear_deferred_abort_state(self, room: int) -> None:
            pass

        def submit_prefill_recompute(self, *args: Any, **kwargs: Any) -> None:
            raise NotServed("a prompt to be read again on the prefill side, as after a pause that retracts (0.5.23)")

    class Side:
        """What both sides of one request's transfer do alike."""

        kv_mgr: Any
        bootstrap_room: Any
        room: Room
        conclude_state: int | None = None

        def poll(self) -> int:
            if self.conclude_state is not None:
                return self.conclude_state
            if self.bootstrap_room in RULES.failed or self.room.given_up():
                return self._conclude(poll.Failed)
            return self._polled()

        def _polled(self) -> int:
            """The state of a transfer that is neither over nor failed."""
            raise NotImplementedError

        def _conclude(self, state: Any) -> int:
            self.conclude_state = int(state)
            return self.conclude_state

        def failure_exception(self) -> None:
            asked = self.bootstrap_room in RULES.failed
            raise RuntimeError("the scenario lets this transfer fail" if asked else "the other side gave it up")

        def abort(self) -> None:
            self.room.give_up()
            self.conclude_state = int(poll.Failed)

        def clear(self) -> None:
            pass

    class Sender(Side, conn.BaseKVSender):
        """The prefill side of one request's transfer."""

        def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *args: Any, **kwargs: Any) -> None:
            self.kv_mgr, self.bootstrap_room = mgr, bootstrap_room
            self.room = Room(folder, bootstrap_room, mgr.rank)
            self.pages = self.sent = self.number = 0
            self.row = -1
            self.done = False

        def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
            self.pages, self.row = int(num_kv_indices), -1 if aux_index is None else int(aux_index)

        def pop_decode_prefix_len(self) -> int:
            want = self.room.asked()
            return 0 if want is None else want.prefix

        def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
            return num_pages > 0 or last_chunk

        def send(self, kv_indices: Any, *args: Any, **kwargs: Any) -> None:
            settle_device()
            pages = [int(page) for page in kv_indices]
            own = self.kv_mgr.kv_args
            self.sent += len(pages)
            last = self.sent >= self.pages
            spans = zip(own.kv_data_ptrs, own.kv_item_lens, strict=True)
            buffers = [read_items(address, size, pages) for address, size in spans]
            for change in CHANGE_PAGES:
                buffers = change(buffers, pages)
            rows = zip(own.aux_data_ptrs, own.aux_item_lens, strict=True)
            metadata = [read_items(address, size, [self.row]) for address, size in rows] if last else None
            self.room.send(self.number, buffers, metadata)
            self.number += 1
            self.done = last

        def _polled(self) -> int:
            if self.room.asked() is None:
                return int(poll.Bootstrapping)
            if not self.done:
                return int(poll.WaitingForInput)
            if self.bootstrap_room in RULES.held | RULES.late:
                return int(poll.Transferring)
            return self._conclude(poll.Success)

        def poll_pp_consensus(self) -> int:
            return self.poll()

        def get_transfer_metric(self) -> Any:
            return conn.KVTransferMetric()

        def mark_prefill_complete(self) -> None:
            pass

    class Receiver(Side, conn.BaseKVReceiver):
        """The decode side of one request's transfer."""

        def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None, **kwargs: Any) -> None:
            self.kv_mgr, self.bootstrap_room = mgr, bootstrap_room
            self.room = Room(folder, bootstrap_room or 0, mgr.rank)
            self.require_staging = self.ready = False
            self.bootstrap_infos: list[Any] = []
            self.want: Want | None = None

        def init(self, prefill_dp_rank: int, **kwargs: Any) -> None:
            self.ready = True

        @property
        def abort_notified(self) -> bool:
            """Whether the prefill side was told to stop and has not said yet that it did."""
            return self.bootstrap_room in RULES.late

        def send_metadata(
            self,
            kv_indices: Any,
            aux_index: int | None = None,
            state_indices: Any = None,
            decode_prefix_len: int | None = None,
            **kwargs: Any,
        ) -> None:
            row = -1 if aux_index is None else int(aux_index)
            self.want = Want([int(page) for page in kv_indices], row, int(decode_prefix_len or 0))
            self.room.ask(self.want)
            RULES.lands[self.room.number] = partial(self._take, self.want)

        def _polled(self) -> int:
            if not self.ready:
                return int(poll.Bootstrapping)
            if self.want is None:
                return int(poll.WaitingForInput)
            away = self.bootstrap_room in RULES.held | RULES.dropped | RULES.late
            if away or not self.room.complete():
                return int(poll.Transferring)
            self._take(self.want)
            return self._conclude(poll.Success)

        def _take(self, want: Want) -> None:
            """Write what arrived where this side asked for it."""
            settle_device()
            own, first = self.kv_mgr.kv_args, 0
            for part in self.room.parts():
                held = len(part["kv0"]) // own.kv_item_lens[0]
                pages = want.pages[first : first + held]
                first += held
                for i, (address, size) in enumerate(zip(own.kv_data_ptrs, own.kv_item_lens, strict=True)):
                    write_items(address, size, pages, part[f"kv{i}"])
                if "meta0" in part:
                    for i, (address, size) in enumerate(zip(own.aux_data_ptrs, own.aux_item_lens, strict=True)):
                        write_items(address, size, [want.row], part[f"meta{i}"])
            self.room.close()

        def ensure_abort_notified(self, **kwargs: Any) -> None:
            """Nobody writes into this side's memory but itself, when a scenario lets what is late land."""

    class Bootstrap(conn.BaseKVBootstrapServer):
        """There is nobody to be found: both sides know the folder."""

        def __init__(self, host: str, port: int, *args: Any, **kwargs: Any) -> None:
            pass

    kinds = {"manager": Manager, "sender": Sender, "receiver": Receiver, "bootstrap_server": Bootstrap}
    return {"kvargs": conn.KVArgs, **kinds}


class _AnyAddress:
    """Whatever address is asked for: one prefill engine without DP ranks."""

    def get(self, address: str, default: Any = None) -> Any:
        return types.SimpleNamespace(dp_size=1, follow_bootstrap_room=True)
