"""Entry point of the engine process, which the API process starts: `python -m skyrl.tinker.engine`."""

from skyrl.tinker.engine.loop import main

raise SystemExit(main())
