"""Which signatures a runner knows, what is known of each, and which calls it was not to learn from."""

from __future__ import annotations

from collections import Counter

from diffgraph.reasons import Reason, Refused
from diffgraph.recording.signature import Call, Signature
from diffgraph.routing.entry import Entry
from diffgraph.shapes.capture_shape import CaptureShape
from diffgraph.shapes.traffic import asked_shape

#: Signatures that differ in a number alone and may be recorded side by side; more, and the number is one that keeps changing.
MAX_NUMBER_VARIANTS = 16
#: More signatures than anybody uses: something in the call is another one each time.
MAX_ENTRIES = 4096
MAX_UNSEEN = 64


class Table:
    """Entries by signature. `name`: of the module; `positional`: of its forward's arguments."""

    def __init__(self, name: str, positional: tuple[str, ...]) -> None:
        self.entries: dict[Signature, Entry] = {}
        self.unseen: Counter[str] = Counter()  # calls that start-up capture has not foreseen, by their label
        self.unseen_shapes: list[CaptureShape | None] = []
        self._name, self._positional = name, positional
        self._variants: Counter[Signature] = Counter()  # signatures by what they are without their numbers

    def label(self, signature: Signature) -> str:
        return f"{self._name}: {signature.label(self._positional)}"

    def add(self, call: Call) -> Entry:
        """A new signature's entry; raises `Refused` for one that is not to be recorded."""
        signature = call.signature
        alike = signature.without_numbers()
        try:
            self.check_room(signature)
        except Refused as refused:
            for known, other in self.entries.items() if refused.reason is Reason.HOST_VALUE_CHANGED else ():
                if other.recording is None and known.without_numbers() == alike:  # those too will not come again
                    other.refused = refused.reason
            raise
        self._variants[alike] += 1
        self.entries[signature] = entry = Entry(self.label(signature))
        return entry

    def check_room(self, signature: Signature) -> None:
        """Raises `Refused` where this new signature is one too many."""
        if self._variants[signature.without_numbers()] >= MAX_NUMBER_VARIANTS:
            raise Refused(Reason.HOST_VALUE_CHANGED, "a number among the arguments is another one at each call")
        if len(self.entries) >= MAX_ENTRIES:
            raise Refused(Reason.UNSEEN_SIGNATURE, f"{MAX_ENTRIES} signatures are known already")

    def knows(self, signature: Signature, entry: Entry) -> bool:
        """Whether it is still the signature's entry, or one of its values'."""
        return self.entries.get(signature) is entry.values.first

    def note_unseen(self, call: Call) -> str:
        """Of a call whose signature is not to be added; returns its label."""
        label = self.label(call.signature)
        if label not in self.unseen and len(self.unseen) < MAX_UNSEEN:
            self.unseen_shapes.append(asked_shape(call.prompt))
        if label in self.unseen or len(self.unseen) < MAX_UNSEEN:
            self.unseen[label] += 1
        return label

    def all_entries(self) -> list[Entry]:
        """Of every signature, with each of those that differ in host values."""
        return [entry for first in list(self.entries.values()) for entry in first.values.entries]

    def clear(self) -> list[Entry]:
        """Forget all; returns what was known."""
        known, self.entries, self._variants = self.all_entries(), {}, Counter()
        return known
