"""`eaglecheck engines pack`: one small file with what SGLang releases need beside the torch of a machine.

Needs a package index (through pip) and nvcc. The releases' own metadata says what they want;
`harness.machines.bundle_contents` says what of it travels. This module must not install anything, nor import torch or
sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.archive.faults import home_room
from harness.engines import dependencies
from harness.engines.dependencies import EnvError, Progress
from harness.machines import archives, bundle, bundle_contents, fit, flashinfer, wheels
from harness.machines.bundle import Manifest, Release, Tree
from harness.machines.bundle_contents import CONTROL, CONTROL_TESTS, FLASHINFER, FROM, PINNED
from harness.machines.wheels import Files, Job

#: A bundle and what it is made from: 1.5 GB of wheels for four releases, most of it sglang-kernel; a torch is 0.8 GB.
NEED_GB = 4.0


def pack(
    versions: Sequence[str],
    *,
    torch: str,
    python: str,
    output: Path,
    progress: Progress,
    part: str = "",
    include: Sequence[str] = (),
    with_torch: bool = False,
    cards: int = 1,
    limit: int = 0,
) -> Manifest:
    """Write the bundle of these releases for a machine with that torch (2.11.0+cu130) and Python (3.12).

    part: write what the releases' own bundle does without (one of `bundle_contents.PARTS`), to be unpacked after it;
    include: such parts that go into the releases' own bundle. with_torch: a release that pins another torch gets it
    from there; with its NCCL if it is for several cards. limit: bytes that no file may exceed, for several files; 0 for
    one.
    EnvError where a release wants another torch, asks for something unknown, or cannot be fetched or compiled.
    """
    folder = dependencies.home() / "pack"
    with dependencies.installing("pack", progress) as lock, home_room(folder):
        job = Job(
            torch=torch,
            python=python,
            folder=folder,
            lock=lock,
            progress=progress,
            with_torch=with_torch,
            cards=cards,
            include=frozenset(include),
        )
        dependencies.check_room(NEED_GB, what="to pack")
        sources = _sglang_wheels(job, versions)
        control = [job.add_wheels("control", job.fetch({**CONTROL, **CONTROL_TESTS}).values(), archive="base")]
        releases = tuple(_release(job, version, sources[version], control) for version in versions)
        manifest = _manifest(job, releases, control)
        if part:
            manifest = _only_part(job, manifest, part)
        manifest = archives.write(job, manifest, output, limit=limit)
    return manifest


def _sglang_wheels(job: Job, versions: Sequence[str]) -> dict[str, Path]:
    """Each release's own wheel, first of all: its metadata may say that it cannot be packed for this torch."""
    found = {version: job.fetch({"sglang": version})["sglang"] for version in versions}
    for version, path in found.items():
        wanted = wheels.requirements(path, python=job.python)
        bundle_contents.check_requirements(version, wanted, torch=job.torch, with_torch=job.with_torch)
        bundle_contents.own_torch(version, wanted, torch=job.torch)
    return found


def _base(job: Job, carried: dict[str, str]) -> str:
    """The dependencies that releases share, at one version each, with flashinfer's kernels compiled; made once."""
    if (key := str(sorted(carried.items()))) not in job.bases:
        found = job.fetch(carried)
        files = Files(archive="base")
        for name, path in found.items():
            wheels.add_wheel(files, path, job.rules(name))
        files.content |= flashinfer.kernels(job, found) if FLASHINFER in carried else {}
        job.bases[key] = job.add("base", files)
    return job.bases[key]


def _torch(job: Job, version: str) -> tuple[list[str], str]:
    """The trees of a torch that travels, and its build; EnvError where it is of another CUDA than the machine's."""
    beside = bundle_contents.TORCHES[version]
    wanted = {name: beside[name] for name in ("torchvision", *(("nvidia-nccl-cu13",) if job.cards > 1 else ()))}
    found = job.fetch({"torch": version, **wanted, "triton": beside["triton"]})
    build = fit.build_of(wheels.text_of(found["torch"], "torch/version.py"))
    if build.partition("+")[2] != job.torch.partition("+")[2]:
        raise EnvError(
            f"torch {version} is published as {build}, and takes NVIDIA's libraries from beside torch {job.torch}",
            next_step="name a torch of the same CUDA:  --torch VERSION+" + build.partition("+")[2],
        )
    job.progress(f"torch {build}: stripping")
    own = [found[name] for name in ("torch", *wanted)]
    torch = job.add_wheels(f"torch-{version}", own, archive="torch", machine=bundle_contents.MACHINE)
    return [torch, job.add_wheels(f"triton-{beside['triton']}", [found["triton"]], archive="triton")], build


def _release(job: Job, version: str, sglang: Path, control: Sequence[str]) -> Release:
    """One release's trees in import order: stubs, its own, what it pins, its torch, then what others share."""
    wanted = wheels.requirements(sglang, python=job.python)
    job.progress(f"SGLang {version}: stripping")
    own = [_stub(job, stub, files) for stub, files in bundle_contents.stubs(version).items()]
    own.append(job.add_wheels(f"sglang-{version}", [sglang], archive="sglang"))
    since = [name for name, (first, _) in FROM.items() if bundle_contents.is_from(version, first)]
    own_pins = {name: bundle_contents.pinned(wanted[name]) for name in (*PINNED, *since)}
    for name, path in job.fetch(own_pins).items():
        archive = {"sglang-kernel": "kernels", "transformers": "transformers"}.get(name, "base")
        own.append(job.add_wheels(f"{name}-{own_pins[name]}", [path], archive=archive))
    torch = bundle_contents.own_torch(version, wanted, torch=job.torch)
    carried, build = _torch(job, torch) if torch else ([], "")
    base = _base(job, bundle_contents.carried(wanted, own_torch=bool(torch)))
    pins = bundle_contents.flashinfer(version, wanted, asked="flashinfer" in job.include) if torch else {}
    carried += [flashinfer.tree(job, pins, sglang)] if pins else []
    return Release(
        version=version,
        trees=(*own, *carried, base, *control),
        environ=bundle_contents.environ(version, own_torch=bool(torch), flashinfer=bool(pins)),
        differences=bundle_contents.differences(version, wanted, own_torch=bool(torch), flashinfer=bool(pins)),
        torch=build,
        programs=bundle_contents.programs(own_torch=bool(torch)),
    )


def _stub(job: Job, name: str, files: dict[str, str]) -> str:
    content = {place: text.encode() for place, text in files.items()}
    packages = dict.fromkeys(place.partition("/")[0] for place in files)
    return job.add(name, Files(archive="base", content=content, stands_for=tuple(packages)))


def _manifest(job: Job, releases: tuple[Release, ...], control: Sequence[str]) -> Manifest:
    used = {name for release in releases for name in release.trees}
    expects = bundle_contents.ON_RUNNER + bundle_contents.CONTROL_ON_RUNNER
    return Manifest(
        python=job.python,
        torch=job.torch,
        glibc=f"2.{job.glibc}",
        cuda_arch=bundle_contents.CUDA_ARCH,
        expects=tuple(sorted(expects)),
        control=tuple(control),
        releases=releases,
        trees=tuple(files.tree(name) for name, files in job.trees.items() if name in used),
        archives=(),
    )


def _only_part(job: Job, manifest: Manifest, part: str) -> Manifest:
    """The files that a rule left out for this part, once each, and into which of the releases' trees they belong."""
    wheel, _ = bundle_contents.PARTS[part]
    trees: dict[str, Tree] = {}
    for tree in manifest.trees:
        version = next((one.version for one in tree.wheels if one.name == wheel), None)
        if version is None or tree.archive == part:  # flashinfer beside a torch of its own has no use for sources
            continue
        files = Files(archive=part)
        wheels.add_wheel(files, job.fetch({wheel: version})[wheel], bundle_contents.RULES[wheel], part=part)
        name = bundle.tree_name(part, list(files.content.items()))
        own, before = files.tree(name), trees.get(name)
        trees[name] = replace(
            own,
            wheels=(*(before.wheels if before else ()), *own.wheels),
            slimmed=(),
            into=(*(before.into if before else ()), tree.name),
        )
        job.trees[name] = files
    if not trees:
        raise EnvError(
            f"none of these releases takes {part} from {wheel} into its bundle afterwards",
            next_step=f"pack it with them:  --with {part}",
        )
    return replace(manifest, releases=(), control=(), expects=(), trees=tuple(trees.values()))
