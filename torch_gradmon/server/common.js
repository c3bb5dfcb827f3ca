"use strict";
const make = (tag, text, className) => {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;  // never HTML: names come from a user's model and disk
  if (className) element.className = className;
  return element;
};
// the token of the page's address goes into each other address: a cookie would go to every other port of this machine too
const token = new URLSearchParams(location.search).get("token");
const withToken = (address) => {
  if (!token) return address;
  const [place, ...mark] = address.split("#");
  return [`${place}${place.includes("?") ? "&" : "?"}token=${token}`, ...mark].join("#");
};
for (const link of document.querySelectorAll('a[href="./"]')) link.href = withToken("./");
// a stream of the server while the page is in sight: a browser has six connections for all of its pages together, so hidden ones give theirs back
const listen = (address, handlers, onLost) => {
  let events = null, again = null;
  const open = () => {
    clearTimeout(again);
    events = new EventSource(withToken(address));
    for (const [kind, handle] of Object.entries(handlers)) events.addEventListener(kind, (event) => handle(JSON.parse(event.data)));
    events.addEventListener("error", () => {
      onLost();
      if (events?.readyState === EventSource.CLOSED) again = setTimeout(open, 3000);  // it does not try again by itself after an error
    });
  };
  const close = () => {
    clearTimeout(again);
    events?.close();
    events = null;
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) close();
    else if (events === null) open();
  });
  if (!document.hidden) open();
};
