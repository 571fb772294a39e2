"""What a forward does to the containers that it is given: it takes from a list, or fills a cache. A replay does it again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diffgraph.values.tree import LEAF, Spec, key_of


def can_follow(before: Spec, after: Spec) -> bool:
    """Whether containers of the first spec can be made to hold what those of the second do, each staying the object it is."""
    if before == LEAF or after == LEAF:
        return before == after
    kind, names, children = before  # type: ignore[misc]
    other_kind, other_names, others = after  # type: ignore[misc]
    if kind is not other_kind:
        return False
    if names == other_names and len(children) == len(others):
        return all(map(can_follow, children, others))
    if not names and not other_names:  # which of a list's inner containers went or came does not show
        return all(child == LEAF for child in (*children, *others))
    known = dict(zip(names, children, strict=True))
    return all(other == LEAF or can_follow(known.get(name, LEAF), other) for name, other in zip(other_names, others, strict=True))


def same_containers(before: dict[tuple[Any, ...], Any], after: dict[tuple[Any, ...], Any]) -> bool:
    """Whether what is still there, of two results of `containers`, is the very same."""
    return all(after[path] is container for path, container in before.items() if path in after)


def follow(mine: Any, spec: Spec, leaves: Iterator[Any]) -> Any:
    """Make `mine`, and the containers in it, hold these leaves in this spec, which `can_follow` theirs. Returns `mine`."""
    if spec == LEAF:
        return next(leaves)
    kind, names, children = spec  # type: ignore[misc]
    if kind is list or issubclass(kind, tuple):
        values = [follow(mine[i] if child != LEAF else None, child, leaves) for i, child in enumerate(children)]
        if kind is list:
            mine[:] = values
        return mine
    held = mine if issubclass(kind, dict) else vars(mine)
    keys = list(map(key_of, names))
    values = [follow(held.get(key), child, leaves) for key, child in zip(keys, children, strict=True)]
    held.clear()
    held.update(zip(keys, values, strict=True))
    return mine
