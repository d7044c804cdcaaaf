"""The engine, in pure Python: scheduling, text, streams and the `MLCEngine` and `AsyncMLCEngine` on top."""
