"""Copies of selected tokens."""
