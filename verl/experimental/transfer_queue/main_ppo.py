"""As `verl.trainer.main_ppo`: samples always go through a queue (`queue.engine`)."""

import sys

from verl.trainer.main_ppo import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
