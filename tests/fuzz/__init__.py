"""Random training programs, each run bare, recorded and watched: bits, numbers, staleness, leaks and warnings must hold.

How it goes together:

* ``program`` is what is drawn, plain data that prints as a script; ``drawing`` draws it from a seed and excludes what cannot be.
* ``models``, ``optimizers`` and ``wrapping`` build what trains. ``plan`` turns a program into operations, ``loop`` runs them.
* ``observer`` is what a loop tells of itself. ``recorder`` takes the truth from it with hooks of its own; ``watcher`` is the monitor.
* ``asks`` is what a monitor is asked for, ``oracle`` what it must then say, naively in float64.
* ``reasons`` and ``remarks`` are what it may say about an absent value and in a warning, each with the fact that makes it true.
* ``checks`` compares, ``runner`` does all of it for one program and makes a failing program smaller.

``python -m tests.fuzz --count 1000 --seed 0`` runs many; ``--show SEED`` prints one.
"""
