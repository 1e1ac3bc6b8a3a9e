"""Give IREE's own dispatches for GPUs workgroups of a size of ours.

IREE 3.13 knows no flag for it, loses what an operation asks for when it fuses operations, and takes
specifications from outside (``--iree-codegen-tuning-spec-path``) for ROCm only. So compiling stops
where it has decided how each dispatch is tiled (``--compile-to=executable-configurations``), the
text of the module is changed here, and compiling goes on from there.
"""

from __future__ import annotations

import re

__all__ = ["CONFIGURABLE", "resize_workgroups"]

CONFIGURABLE = ("cuda", "rocm")
"""IREE's code generators whose dispatches can be given another size."""

_CONFIG = re.compile(r"lowering_config = #iree_gpu\.lowering_config<\{([^{}]*)\}>")
_ITERATORS = re.compile(r"iterator_types = \[([^\]]*)\]")
_ALIAS = re.compile(r"^(#\w+) = (#iree_(?:gpu|codegen)\.(?:lowering_config|translation_info)<.*)$")
_SIZE = re.compile(
    r"(#iree_gpu\.pipeline<TileAndFuse>) workgroup_size = \[\d+, 1, 1\]( subgroup_size = \d+)"
)


def resize_workgroups(text: str, threads: int) -> str:
    """Let each thread of a workgroup do a cell, and a row of an operation at a time.

    By default IREE takes one subgroup, and for contractions it gives neighbouring threads
    neighbouring rows, so that none of their accesses to arrays ``[row, cell]`` are neighbours.

    Parameters
    ----------
    text
        A module in which every dispatch is configured. The cell is the last parallel dimension of
        operations, as in all that flat batching makes.
    threads
        Of a workgroup.

    Returns
    -------
    str
        The module; dispatches that are ours, or for which IREE has chosen another pipeline than
        TileAndFuse, stay as they are.
    """
    aliases: dict[str, str] = {}
    lines = []
    for line in text.splitlines():
        found = _ALIAS.match(line)
        if found is not None:
            # the same text may stand for several operations, so it is written out at each
            aliases[found[1]] = found[2]
        else:
            lines.append(line)
    names = "|".join(sorted(map(re.escape, aliases), key=len, reverse=True))
    used = re.compile(rf"({names})(?!\w)") if aliases else None
    changed = []
    for line in lines:
        if used is not None:
            line = used.sub(lambda name: aliases[name[1]], line)
        changed.append(_resize(line, threads))
    return "\n".join(changed) + "\n"


def _resize(line: str, threads: int) -> str:
    iterators = _ITERATORS.search(line)
    if iterators is not None and "thread =" in line:
        kinds = re.findall(r"parallel|reduction", iterators[1])
        if "parallel" in kinds:
            cell = len(kinds) - 1 - kinds[::-1].index("parallel")
            line = _CONFIG.sub(lambda found: _tiles(found[1], kinds, cell, threads), line)
    return _SIZE.sub(rf"\1 workgroup_size = [{threads}, 1, 1]\2", line)


def _tiles(old: str, kinds: list[str], cell: int, threads: int) -> str:
    """The config of an operation by the kinds of its dimensions; reductions stay as IREE has them.

    What a thread adds up at once is in its registers, whoever gets which rows.
    """
    parallel = [int(kind == "parallel") for kind in kinds]
    workgroup = [threads if i == cell else one for i, one in enumerate(parallel)]
    reduction = re.search(r"reduction = \[[^\]]*\]", old)
    levels = [f"thread = {parallel}", f"workgroup = {workgroup}"]
    if reduction is not None:
        levels.insert(0, reduction[0])
    return f"lowering_config = #iree_gpu.lowering_config<{{{', '.join(levels)}}}>"
