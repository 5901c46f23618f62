"""HTML reports of a plan and of a study."""
