"""One page about a run, that works without a network. Needs plotly and jinja2."""
