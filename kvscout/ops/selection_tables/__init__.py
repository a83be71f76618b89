"""Block tables of selected blocks."""
