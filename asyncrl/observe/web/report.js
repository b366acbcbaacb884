// A report: the page of the documents that are in it.
"use strict";

new RunPage(document.getElementById("page")).update(JSON.parse(document.getElementById("data").textContent));
