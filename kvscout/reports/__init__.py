"""What is made of the files that ``kvscout bench --json`` writes: figures and tables, each of one run."""
