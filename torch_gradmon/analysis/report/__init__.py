"""One HTML page about a run or two, which works offline. Needs plotly and jinja2."""
