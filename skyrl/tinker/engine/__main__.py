"""`python -m skyrl.tinker.engine`, which the API process starts."""

from skyrl.tinker.engine.loop import main

raise SystemExit(main())
