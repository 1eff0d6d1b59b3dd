import sys

from prime_composer.cli.commands import main

sys.exit(main())
