"""`python -m covey`, and `torchrun -m covey train FILE` for several processes."""

from covey.cli import main

main()
