// Figures as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** 12,345 */
export const count = (value) => whole.format(value);

/** Three significant digits: 0.123, 4.56, 78.9, 1,234. */
export function number(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 100 || value === 0) return whole.format(value);
  return value.toFixed(size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

/** Seconds with a fitting unit: 850 µs, 12.3 ms, 1.25 s, 3 min. */
export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${number(value * 1e6)} µs`;
  if (value < 1) return `${number(value * 1e3)} ms`;
  if (value < 120) return `${number(value)} s`;
  return duration(value);
}

/** A span of time in two units: 5 min, 3 h 12 min, 2 d 4 h. */
export function duration(value) {
  const minutes = Math.floor(value / 60);
  if (minutes < 1) return `${Math.floor(value)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** Bytes in decimal units: 512 B, 23.0 kB, 269 MB, 4.29 GB. */
export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return unit === 0 ? `${whole.format(value)} B` : `${number(value)} ${units[unit]}`;
}

/** 0.123 -> 12.3 % */
export const percent = (value) => (Number.isFinite(value) ? `${value >= 0.995 || value === 0 ? Math.round(value * 100) : (value * 100).toFixed(1)} %` : "–");
