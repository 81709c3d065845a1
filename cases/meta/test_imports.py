"""What a release imports of a package wherever it starts, read from a made-up wheel."""

import pytest

from cases.meta.pretended_wheels import wheel
from harness.machines.imports import lacking

SCHEDULER, TOWER = "sglang/srt/managers/scheduler.py", "sglang/srt/layers/vision.py"
HELD = {"package/__init__.py": b"from .version import __version__\n", "package/draw.py": b"def draw(): ...\nRULE = 1\n"}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({SCHEDULER: "from package import __version__, draw\nfrom package.draw import RULE, draw"}, []),
        ({SCHEDULER: "from package import attend"}, ["package: attend"]),
        ({SCHEDULER: "if _is_cuda:\n    from package.attention import attend"}, ["package.attention: attend"]),
        ({SCHEDULER: "class A:\n    from package.draw import other"}, ["package.draw: other"]),
        ({SCHEDULER: "def later():\n    from package import attend"}, []),
        ({SCHEDULER: "try:\n    from package import attend\nexcept ImportError:\n    attend = None"}, []),
        ({SCHEDULER: "try:\n    x = 1\nexcept KeyError:\n    from package import attend"}, []),
        ({SCHEDULER: "try:\n    from package import attend\nexcept KeyError:\n    pass"}, ["package: attend"]),
        ({SCHEDULER: "if is_flashinfer_available():\n    from package import attend\nelse:\n    x = 1"}, []),
        ({SCHEDULER: "if no:\n    x = 1\nelse:\n    from package import attend"}, ["package: attend"]),
        ({TOWER: "from package import attend"}, []),
        ({SCHEDULER: "from ..layers import vision", TOWER: "from package import attend"}, ["package: attend"]),
        ({SCHEDULER: "import sglang.srt.layers.vision", TOWER: "from package import attend"}, ["package: attend"]),
        ({"sglang/srt/models/mimo.py": "from package import attend"}, ["package: attend"]),
    ],
)
def test_what_is_imported_at_the_start_and_is_not_there_is_named(tmp_path, files, found):
    made = wheel(tmp_path, "sglang", "0.5.22", {place: text.encode() for place, text in files.items()})
    assert lacking(made, "package", HELD) == found
