"""`eogp evaluate`: how well the scores of a store, and of plain baselines, agree with uncompressed EK-FAC, with retraining, and with known facts."""
