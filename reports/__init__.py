"""How results look: tables, plots, pages; reads records only."""
