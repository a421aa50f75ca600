"""Earlier conversations: the SQLite file that stores them, and the screen that searches and resumes them."""
