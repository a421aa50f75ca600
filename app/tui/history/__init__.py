"""Earlier conversations: kept in one SQLite file, searched and resumed from one screen."""
