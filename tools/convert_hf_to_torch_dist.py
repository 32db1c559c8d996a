"""slime's name for `hpcrl convert to-torch-dist`: a Hugging Face directory -> a torch_dist checkpoint.  See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hpcrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-torch-dist", *sys.argv[1:]]))
