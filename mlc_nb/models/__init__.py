"""Architecture families as `relax.frontend.nn` modules, one file each."""
