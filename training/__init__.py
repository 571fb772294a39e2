"""How the embedded emoji model came to be: pictures, wordings, training, evaluation. See README.md here."""
