"""Is what was recorded still true? State that a call's arguments do not show.

`fingerprint` lays out what a recording relies on and compares it at each call; `reach` tells what a forward may read, `objects`
and `contents` how that is read and compared, `composed` what quantised weights consist of, and `writes` whether anything was
written at all.
"""

from diffgraph.guards.fingerprint import Fingerprint

__all__ = ["Fingerprint"]
