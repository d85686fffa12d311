import sys

from verl.cli import main

sys.exit(main())
