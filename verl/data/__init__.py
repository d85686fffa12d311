"""Datasets: files (`files`), rows (`formats`), tokenised tables and the resumable cursor (`source`). No torch here."""
