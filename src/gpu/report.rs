//! What the check found.

use comfy_table::{LineStyle, Table, TableStyle};
use serde::Serialize;

/// A line under the header.
const STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// One thing that was checked.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    /// Where the holder's and the reader's pool are.
    pub memory: String,
    /// What was checked.
    pub name: &'static str,
    /// Whether it is as it must be.
    pub ok: bool,
    /// In words.
    pub found: String,
}

/// Reads of one geometry, beside plain copies of as many bytes in the same run.
#[derive(Debug, Clone, Serialize)]
pub struct Rate {
    /// Where the holder's and the reader's pool are.
    pub memory: String,
    /// Regions of the pools.
    pub regions: u32,
    /// Bytes of a block of a region.
    pub block_bytes: u64,
    /// Bytes of a read.
    pub bytes: u64,
    /// Median of the reads, the lease check included, GB/s.
    pub read_gbps: f64,
    /// The fastest and the slowest.
    pub read_gbps_range: (f64, f64),
    /// Median of as many copies within the reader's memory, GB/s.
    pub copy_gbps: f64,
    /// Descriptors of a read.
    pub descriptors: u64,
}

/// All of it.
#[derive(Debug, Clone, Default, Serialize)]
pub struct GpuReport {
    /// Whether everything is as it must be.
    pub ok: bool,
    /// Where the pools were asked for.
    pub memory: String,
    /// The GPU, where there is one.
    pub gpu: Option<String>,
    /// What was used, in NIXL's words.
    pub nixl: String,
    /// What has carried the bytes, as far as it is known.
    pub carried_by: Vec<String>,
    /// The checks.
    pub checks: Vec<Check>,
    /// The rates.
    pub rates: Vec<Rate>,
}

impl GpuReport {
    /// For people.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "memory      {}\ngpu         {}\nused        {}\ncarried by  {}\n\n",
            self.memory,
            self.gpu
                .as_deref()
                .unwrap_or("none: this says nothing about GPUs"),
            self.nixl,
            self.carried_by.join(", "),
        );
        let mut checks = Table::new();
        checks.load_style(STYLE);
        checks.set_header(["", "from -> to", "check", "found"]);
        for check in &self.checks {
            let mark = if check.ok { "ok" } else { "WRONG" };
            checks.add_row([mark, &check.memory, check.name, &check.found]);
        }
        text.push_str(&checks.to_string());
        text.push_str("\n\n");
        let mut rates = Table::new();
        rates.load_style(STYLE);
        rates.set_header([
            "from -> to",
            "regions",
            "block KiB",
            "read MiB",
            "descriptors",
            "read GB/s",
            "(least - most)",
            "copy GB/s",
            "read / copy",
        ]);
        for rate in &self.rates {
            let (least, most) = rate.read_gbps_range;
            rates.add_row([
                rate.memory.clone(),
                rate.regions.to_string(),
                (rate.block_bytes >> 10).to_string(),
                (rate.bytes >> 20).to_string(),
                rate.descriptors.to_string(),
                format!("{:.2}", rate.read_gbps),
                format!("({least:.2} - {most:.2})"),
                format!("{:.2}", rate.copy_gbps),
                format!(
                    "{:.2}",
                    rate.read_gbps / rate.copy_gbps.max(f64::MIN_POSITIVE)
                ),
            ]);
        }
        text.push_str(&rates.to_string());
        text.push('\n');
        text
    }
}
