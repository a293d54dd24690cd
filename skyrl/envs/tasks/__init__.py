"""Built-in environments, one per file. `answers` compares mathematical answers, `arithmetic_data` writes rows."""
