"""Boots one SGLang engine, drafts a few tokens and ends. Engine side: started by path, stdlib and SGLang only.

What it prints is one JSON line, after SGLang's own. It must not wrap anything: it shows that a release runs unedited.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def _known(optional: dict[str, Any]) -> dict[str, Any]:
    """Those that this release has."""
    from sglang.srt.server_args import ServerArgs

    names = {name for base in ServerArgs.__mro__ for name in getattr(base, "__annotations__", {})}
    return {name: value for name, value in optional.items() if name in names}


def main() -> None:
    asked = json.loads(sys.argv[1])
    start = time.monotonic()
    import sglang

    imported = time.monotonic()
    engine = sglang.Engine(**asked["arguments"], **_known(asked["optional_arguments"]))
    booted = time.monotonic()
    sampling = {"temperature": 0.0, "max_new_tokens": asked["new_tokens"], "ignore_eos": True}
    results = engine.generate(input_ids=asked["prompts"], sampling_params=sampling)
    done = time.monotonic()
    answer = {
        "release": sglang.__version__,
        "import_s": round(imported - start, 1),
        "boot_s": round(booted - imported, 1),
        "generate_s": round(done - booted, 2),
        "tokens": [len(one["output_ids"]) for one in results],
        "rounds": [one["meta_info"].get("spec_verify_ct", 0) for one in results],
        "first": [list(one["output_ids"])[:8] for one in results],
    }
    print(f"\n{asked['mark']}{json.dumps(answer)}", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
