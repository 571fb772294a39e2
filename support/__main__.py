"""`python -m support`: write SUPPORT.md. `python -m support NAME`: show the cases whose label holds NAME, and write nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before diffusers is imported: it is read once

import torch

from support.cases import all_cases
from support.check import check
from support.table import rows, summary, text, verdict

FILE = Path(__file__).parent.parent / "SUPPORT.md"


def main(names: list[str]) -> None:
    torch.set_num_threads(1)  # for models as small as these, several threads only wait for each other
    if not names:
        made = rows()
        FILE.write_text(text(made))
        print(summary(made))
        return
    for case in all_cases():
        if any(name.lower() in case.label.lower() for name in names):
            found = check(case)
            print(f"{case.label}: {verdict(case, found)}")
            print(f"  {found.segments} segments; breaks {dict(found.breaks)}; host reads {dict(found.host_reads)}")
            print(f"  {' '.join(found.routes)} | {' '.join(found.alternating)} {found.detail}")


if __name__ == "__main__":
    main(sys.argv[1:])
