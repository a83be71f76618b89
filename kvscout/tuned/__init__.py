"""The package's tuned tables, a file a model of GPU, as ``kvscout tune`` writes them (:mod:`kvscout.tuning`)."""
