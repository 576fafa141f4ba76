//! A bench's rows as a table for people.

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

use super::contender::Contender;
use super::row::BenchReport;

/// A line under the header and one under the last row.
const STYLE: TableStyle = TableStyle::new()
    .header_separator(LineStyle::none().fill('─').junction('─'))
    .bottom_border(LineStyle::none().fill('─').junction('─'));

/// The rows, one below the other, and who is missing.
#[must_use]
pub fn to_text(report: &BenchReport) -> String {
    let machine = &report.machine;
    let mut text = format!(
        "{}, {} cores, Linux {}, NIXL {}, load {:.2}\n",
        machine.cpu, machine.cores, machine.kernel, machine.nixl, machine.load
    );
    let mut table = Table::new();
    table.load_style(STYLE).set_header([
        "case",
        "who",
        "carried by",
        "median ms",
        "min - max ms",
        "submit us",
        "CPU s/GiB",
        "descriptors",
        "GB/s",
        "bytes",
    ]);
    for column in 3..9 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for row in &report.rows {
        table.add_row([
            row.case.clone(),
            Contender::new(row.who, &row.setting).name(),
            row.transport.clone(),
            format!("{:.3}", row.median_ms),
            format!("{:.3} - {:.3}", row.min_ms, row.max_ms),
            format!("{:.1}", row.submit_us),
            format!("{:.3}", row.cpu_s_per_gib),
            row.descriptors.to_string(),
            format!("{:.2}", row.gbps),
            if row.verified { "right" } else { "WRONG" }.to_owned(),
        ]);
    }
    text.push_str(&table.to_string());
    text.push('\n');
    for absent in &report.absent {
        let name = Contender::new(absent.who, &absent.setting).name();
        text.push_str(&format!("absent: {name}: {}\n", absent.why));
    }
    text
}
