"""Where models come from (PyPI packages, local files) and the formats that they come in."""
