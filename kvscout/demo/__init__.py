"""The main job in small: a seeded decoder whose attention is score, select, attend. What ``kvscout demo`` runs."""
