import sys

from torchrl_trl_bridge.cli import main

sys.exit(main())
