"""slime's name for `hpcrl convert to-fp8`: a Hugging Face directory -> one with FP8 weights.  See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hpcrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-fp8", *sys.argv[1:]]))
