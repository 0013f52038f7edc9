"""Training drafts: data, losses, and one recipe per algorithm on the Hugging Face `Trainer`."""
