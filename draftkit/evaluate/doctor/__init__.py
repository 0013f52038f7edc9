"""Why a draft accepts little: known defects, an audit of its weights, and its acceptance under single changes."""
