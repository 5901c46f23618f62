"""Figures and tables of studies, drawn and written from their results."""
