"""slime's name for `hpcrl convert to-hf`: a torch_dist checkpoint -> a Hugging Face directory.  See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hpcrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-hf", *sys.argv[1:]]))
