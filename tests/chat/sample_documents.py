"""Small documents of several formats."""

from __future__ import annotations

import io


def pdf(*pages: str) -> bytes:
    """A PDF of one line of text per page."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        drawn = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * number} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>",
            f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        ]
    content, places = "%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(content))
        content += f"{number} 0 obj\n{each}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    return (
        f"{content}xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
        f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(content)}\n%%EOF\n"
    ).encode("latin-1")


def docx() -> bytes:
    """A DOCX with a heading, a paragraph, a list item and a table."""
    import docx as python_docx

    document = python_docx.Document()
    document.add_heading("Budget", level=2)
    document.add_paragraph("It was cut.")
    document.add_paragraph("by half", style="List Bullet")
    table = document.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "year", "2026"
    written = io.BytesIO()
    document.save(written)
    return written.getvalue()


HTML = b"""<!DOCTYPE html><html><head><title>Notes</title><style>p {color: red}</style></head><body>
<script>document.write("never")</script><h1>Budget</h1><p>It was <b>cut</b> by snake_case &amp; co.</p>
<table><tr><th>year</th></tr><tr><td>2026</td></tr></table><img src="data:image/png;base64,AAAA"></body></html>"""
