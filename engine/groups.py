"""Module groups of the curvature fit: which modules' factors and corrected eigenvalues are in memory together, from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.covariance import input_key
from engine.errors import LimitError
from engine.modules import TrackedModule

CANDIDATES = 16 * 8192  # positions per module at which Lambda is accumulated where the whole grid is too large: 16 per coordinate that stage 1 keeps
EIGH_COPIES = 4  # float64 matrices alive in an eigendecomposition: the factor, its eigenvectors, and two of workspace


@dataclass(frozen=True, slots=True)
class Group:
    """Modules fitted together, in forward order.

    on_candidates: names whose Lambda is accumulated at candidate positions only. bytes: factors (later eigenvectors) and Lambda together.
    """

    modules: tuple[TrackedModule, ...]
    on_candidates: frozenset[str]
    bytes: int


def group_bytes(modules: Iterable[TrackedModule], on_candidates: Iterable[str] = (), *, candidates: int = CANDIDATES, itemsize: int = 4) -> int:
    """Bytes of one group's factors, an input's A counted once, and corrected eigenvalues (with their positions where on a candidate set)."""
    members, few = list(modules), set(on_candidates)
    lam = sum((itemsize + 8) * min(candidates, m.n_parameters) if m.name in few else itemsize * m.n_parameters for m in members)
    return itemsize * sum(d * d for d in _widths(members)) + lam


def decomposition_bytes(modules: Iterable[TrackedModule], itemsize: int = 4) -> int:
    """Bytes that decomposing the largest factor takes in float64, before any Lambda is there: beside the group's factors, in main memory."""
    return (EIGH_COPIES * 8 + itemsize) * max((d * d for d in _widths(list(modules))), default=0)


def factor_bytes(modules: Iterable[TrackedModule], itemsize: int = 4) -> int:
    """Bytes of a group's factors alone."""
    return itemsize * sum(d * d for d in _widths(list(modules)))


def _widths(members: Sequence[TrackedModule]) -> list[int]:
    """Edges of the distinct factors."""
    return [*{input_key(m): m.d_in for m in members}.values(), *(m.d_out for m in members)]


def plan_groups(
    modules: Sequence[TrackedModule],
    budget: int,
    *,
    candidates: int = CANDIDATES,
    itemsize: int = 4,
    beside: Callable[[Sequence[TrackedModule]], int] = lambda members: 0,
) -> list[Group]:
    """Greedy groups under `budget` bytes, from the last layer down, so that the early groups' backward passes are short.

    beside: bytes that a group takes besides its own arrays (its graph reaches down to its lowest module). Modules that share an input stay together, so
    that A is formed once, unless they do not fit together. A module whose Lambda alone is too large is accumulated at `candidates` positions. Raises
    LimitError with the numbers where even that does not fit.
    """

    def size(members: Sequence[TrackedModule], few: set[str]) -> int:
        return group_bytes(members, few, candidates=candidates, itemsize=itemsize) + beside(members)

    few: set[str] = set()
    for module in modules:
        if size([module], few) > budget:
            few.add(module.name)
            needed = min(size([module], few), size([module], set()))
            if needed > budget:
                other = beside([module])
                raise LimitError(
                    f"module {module.name} ({module.d_out} x {module.d_in}) needs {in_gb(needed - other)} for its curvature"
                    + (f" and {in_gb(other)} beside it for a batch's activations" if other else "")
                    + f", and {in_gb(budget)} may be used; "
                    + ("lower --batch-tokens, or use a device with more memory" if other else f"raise --fit-memory to at least {in_gb(needed)}"),
                    field="batch_tokens" if other else "fit_memory",
                )
    groups: list[list[TrackedModule]] = []
    current: list[TrackedModule] = []
    for unit in _units(modules, lambda members: size(members, few) <= budget):
        if current and size([*unit, *current], few) > budget:
            groups.append(current)
            current = []
        current = [*unit, *current]
    if current:
        groups.append(current)
    order = {m.name: i for i, m in enumerate(modules)}
    found = []
    for members in groups:
        names = few & {m.name for m in members}
        in_order = tuple(sorted(members, key=lambda m: order[m.name]))  # members of an input group may lie apart
        found.append(Group(in_order, frozenset(names), group_bytes(members, names, candidates=candidates, itemsize=itemsize)))
    return found


def _units(modules: Sequence[TrackedModule], fits: Callable[[Sequence[TrackedModule]], bool]) -> list[list[TrackedModule]]:
    """Modules with a common input, last first; one by one where they do not fit together."""
    shared: dict[str, list[TrackedModule]] = {}
    for module in modules:
        shared.setdefault(input_key(module), []).append(module)
    units: list[list[TrackedModule]] = []
    for members in reversed(shared.values()):
        units += [members] if fits(members) else [[m] for m in reversed(members)]
    return units


def in_gb(n: int) -> str:
    """Bytes as text: '2.1 GB', '38.4 MB', '210 KB' (1 KB = 1,000 bytes)."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n / 1000:.0f} KB"
