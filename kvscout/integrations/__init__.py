"""Adapters that answer to other libraries' names and argument orders.

Import the one you need: ``import kvscout`` loads none of them. Every argument of the original is honoured, or refused
by a sentence that names it; none is ignored. What differs is said in the docstrings, and in docs/porting.md.
"""
