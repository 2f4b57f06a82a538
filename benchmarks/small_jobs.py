"""Times the backward pass where there is little to do at a time, and on the shape of LLaMA3-8B.

512 and 1024 tokens a sequence (the paper's shapes), one sequence of 2,048 tokens with 32 query heads and 4 or
1 KV heads, and 32 query heads with 8 KV heads at 2,048 to 16,384 tokens. Timed as in `backward`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .backward import named, sweep, sweep_parser
from .shapes import LLAMA3_8B, SHORT, SINGLE
from .systems import AUTO, UNORDERED

FULL = (*SHORT, *SINGLE, *LLAMA3_8B)
QUICK = (*(shape for shape in SHORT if shape.seqlen == 512), *SINGLE, LLAMA3_8B[1])


def main(argv: Sequence[str]) -> int:
    """Measures everything asked for, prints it, and writes it."""
    options = sweep_parser("small_jobs", __doc__, (AUTO, UNORDERED)).parse_args(argv)
    return sweep("small_jobs", options, named(options.cells, QUICK if options.quick else FULL))
