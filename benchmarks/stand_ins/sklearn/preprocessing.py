from typing import Any


class StandardScaler:
    def fit_transform(self, rows: Any) -> Any:
        self.mean, self.scale = rows.mean(0), rows.std(0)
        return self.transform(rows)

    def transform(self, rows: Any) -> Any:
        return (rows - self.mean) / self.scale
