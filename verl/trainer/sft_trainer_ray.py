"""As `verl.trainer.sft_trainer`: there is one loop."""

import sys

from verl.trainer.sft_trainer import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
