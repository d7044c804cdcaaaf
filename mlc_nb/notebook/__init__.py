"""Magics and views for notebooks and the IPython terminal; the only room that knows IPython."""
