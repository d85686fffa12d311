"""As `verl.trainer.main_ppo`: there is one loop."""

import sys

from verl.trainer.main_ppo import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
