"""The model card of a draft, and what it says of measurements, licences and where they were made."""
